"""The HTML pages that show the OpenAPI document: Swagger UI and ReDoc, loaded from a CDN."""

from html import escape

_CDN = "https://cdn.jsdelivr.net/npm"
_HEAD = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
"""


def swagger_page(title: str, document_path: str) -> str:
    """Returns the Swagger UI page, on which operations can be tried."""
    return f"""{_HEAD}\
<title>{escape(title)} - Swagger UI</title>
<link rel="stylesheet" href="{_CDN}/swagger-ui-dist@5/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="{_CDN}/swagger-ui-dist@5/swagger-ui-bundle.js"></script>
<script>
SwaggerUIBundle({{
  url: "{document_path}", dom_id: "#swagger-ui", layout: "BaseLayout", deepLinking: true,
  showExtensions: true, showCommonExtensions: true,
}});
</script>
</body>
</html>
"""


def redoc_page(title: str, document_path: str) -> str:
    """Returns the ReDoc page, which only shows the document."""
    return f"""{_HEAD}\
<title>{escape(title)} - ReDoc</title>
<link rel="stylesheet"
 href="https://fonts.googleapis.com/css?family=Montserrat:300,400,700|Roboto:300,400,700">
<style>body {{ margin: 0; padding: 0; }}</style>
</head>
<body>
<noscript>ReDoc needs JavaScript.</noscript>
<redoc spec-url="{document_path}"></redoc>
<script src="{_CDN}/redoc@2/bundles/redoc.standalone.js"></script>
</body>
</html>
"""
