"""An HTTP server in front of a service: the OpenAI API, figures, and a page to chat on."""
