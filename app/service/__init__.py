"""What is done for a request, with no HTTP in it: which model it is for, its generation, choices and answers."""
