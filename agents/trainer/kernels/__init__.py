"""Operations with kernels of their own: attention, NF4, LoRA, the loss, and their compilation."""
