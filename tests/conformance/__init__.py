"""Other people's suites against the running application: `make conformance`. Not collected by pytest."""
