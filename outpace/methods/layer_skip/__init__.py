"""The target without some attentions and MLPs as a drafter; nothing is trained."""
