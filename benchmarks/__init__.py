"""How fast, and compared with what: each file of rows belongs to one package."""
