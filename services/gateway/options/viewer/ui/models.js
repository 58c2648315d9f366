// Shows the model of this page, and links to the pages of the gateway's other models.

import { byId, element } from "./text.js";

let shown = "";

export function showModels({ model, models }) {
  if (shown === String([model, models])) return;  // A link must not be replaced while it is pressed.
  shown = String([model, models]);
  const own = `/models/${model}/ui`;
  const path = decodeURI(location.pathname);
  const root = path.endsWith(own) ? path.slice(0, -own.length) : path.replace(/\/ui$/, "");
  const others = models.filter((name) => name !== model).sort();
  const links = others.map((name) => element("a", { href: encodeURI(`${root}/models/${name}/ui`), textContent: name }));
  byId("model").replaceChildren(model, ...links);
}
