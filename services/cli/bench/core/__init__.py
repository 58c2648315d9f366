"""The load generator without a network: loads, loops, figures. What it needs is handed in."""
