"""OpenAI's API as pure functions: request models, response bodies, errors."""
