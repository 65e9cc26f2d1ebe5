"""Fine-tuning of pretrained language models: conversations, templates, tokens, presets, layouts, samples."""
