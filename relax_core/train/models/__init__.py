"""Model families. A family is data (family.py); registry.py knows them all. Nothing here imports torch."""
