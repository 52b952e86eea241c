"""One file a stabilizer: a frozen dataclass that fills seams before the model is built."""
