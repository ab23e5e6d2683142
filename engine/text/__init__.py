"""Text and tokens: the tokenizer, text token by token as it comes, and what single tokens read."""
