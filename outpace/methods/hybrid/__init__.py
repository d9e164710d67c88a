"""The method hybrid."""
