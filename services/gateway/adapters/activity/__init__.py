"""The replicas' current activity for displays. It is queried from the schedulers and formatted as
JSON.
"""
