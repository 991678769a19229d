"""How models lie on disk: Hugging Face directories, GGUF files, their tokenizers and chat templates."""
