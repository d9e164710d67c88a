"""Other forms of the same chats: bodies are made chats of ours, and answers are told in their form."""
