"""The methods streaming and coral."""
