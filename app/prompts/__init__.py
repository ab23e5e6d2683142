"""What a request says, as token ids: chats by their template, and texts."""
