"""The method dflash."""
