"""Token trees: shapes, growth, masks."""
