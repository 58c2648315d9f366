"""The OpenAPI documents: the parameters, bodies and possible answers of each route."""
