"""Fair admission: chooses the tenant whose waiting sequence is sent to the replicas next."""
