"""Fair admission: which waiting sequence of which tenant is sent to the replicas next."""
