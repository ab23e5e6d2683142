"""What `LLM` needs beside the engine: prompts in all their forms, outputs as vLLM shapes them, Ctrl-C between steps."""
