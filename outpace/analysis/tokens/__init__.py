"""What is in vocabularies, and what they make of text."""
