"""Where the ranks of an attempt meet: a store of keys that only they can reach.

torch's own TCPStore listens on every interface, asks nobody who he is, and sends in the clear. Ours
listens on one address and speaks TLS 1.3 in both directions, with a key that the master makes for
one attempt and sends over SSH. It is a process of its own, since NCCL may hold the interpreter of
rank 0 while the other ranks have to read from it.
"""
