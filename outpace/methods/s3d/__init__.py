"""The method s3d."""
