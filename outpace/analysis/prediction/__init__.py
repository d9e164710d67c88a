"""What a model will cost on a device, from its shape alone: passes, memory, speed-ups of drafters."""
