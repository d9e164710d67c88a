"""Other programs that the bench measures beside ours: transformers, OpenVINO, llama.cpp."""
