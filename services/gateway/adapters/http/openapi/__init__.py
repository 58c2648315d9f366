"""The OpenAPI documents. They describe the parameters, bodies and answers of each route."""
