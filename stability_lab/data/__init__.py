"""Text to batches: a corpus gives documents, a tokenizer ids, the cache memory maps, the loader windows."""
