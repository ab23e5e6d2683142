"""What is done for a request, with no HTTP in it: which model it is for, who asks, generation, choices and answers."""
