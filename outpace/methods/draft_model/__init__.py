"""The method draft_model."""
