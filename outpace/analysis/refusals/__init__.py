"""Whether refusals stay what they are under speculation: prompts, a judge, and a paired test."""
