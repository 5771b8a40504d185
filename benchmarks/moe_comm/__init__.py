"""bench_moe_comm: what it can be asked (options, routers), what is moved (accounting), who moves it
(backends), on which ranks (processes, emulated), and what is said of it (rows, table, plots).
"""
