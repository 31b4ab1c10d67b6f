"""Language policies: pretrained models, and what learns from the tokens that they sampled."""
