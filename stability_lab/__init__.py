"""Which stabilizer does my language model need, what does it cost, and how sure can I be?"""

__version__ = "0.1.0"
