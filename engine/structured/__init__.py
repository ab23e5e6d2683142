"""The form that an output must have: what a request may ask for, compiled to grammars, turned into masks of tokens."""
