"""Many requests at once over one engine: a queue, a batch that they enter and leave, its memory."""
