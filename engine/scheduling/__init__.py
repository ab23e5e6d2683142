"""What the scheduler is made of: who waits, starts and gives way, the rows of those that run, the plans of steps."""
