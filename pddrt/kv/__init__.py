"""KV memory by pages: who owns which slots. Pure accounting, no tensors."""
