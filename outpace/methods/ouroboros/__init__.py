"""A draft model that writes with phrases, which also lengthen its drafts."""
