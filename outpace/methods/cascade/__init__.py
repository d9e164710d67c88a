"""The method cascade."""
