"""Making drafters: data, features, losses, the loop, formats."""
