"""Streams that enter the target's own pass at a middle layer and guess ahead: streaming and coral."""
