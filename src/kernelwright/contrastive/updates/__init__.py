"""Takes gradient steps: fine-tuning on accepted answers, GRPO, and the model that both change."""
