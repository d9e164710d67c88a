"""Falcon: several tokens per pass of an EAGLE-like layer behind an LSTM, over several passes."""
