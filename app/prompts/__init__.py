"""What a request says, as token ids: a chat's template, and texts encoded off the event loop."""
