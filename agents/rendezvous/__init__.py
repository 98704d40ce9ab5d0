"""The key-value store through which ranks of an attempt connect; only they can reach it.

torch's TCPStore listens on every interface, without authentication or encryption. This store
listens on one address and uses TLS 1.3 with mutual authentication; the master makes the key for one
attempt and sends it over SSH. It runs in a process of its own, because NCCL may hold the GIL of
rank 0 while other ranks have to read from the store.
"""
