// Converts Markdown to elements. Text is never parsed as HTML, so an answer cannot add HTML.

import { element } from "./text.js";

const FENCE = /^\s*(```+|~~~+)\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^\s*>\s?(.*)$/;
const ROW = /^\s*\|(.*)\|\s*$/;
const DIVIDER = /^\s*\|?[\s:|-]+\|[\s:|-]*$/;
const INLINE = /(`+)([^`]|[^`].*?[^`])\1(?!`)|\*\*(?=\S)(.+?)\*\*|\*(?=[^\s*])(.+?)\*|~~(?=\S)(.+?)~~|\[([^\]\n]+)\]\(([^)\s]+)\)/;
const MAX_DEPTH = 8;

/** Returns the blocks of a text, such as paragraphs and lists, as an array of elements. */
export function markdown(text) {
  return blocks(text.split("\n"), 0);
}

function blocks(lines, depth) {
  const made = [];
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    const [fence, heading, quote, item] = [FENCE, HEADING, QUOTE, ITEM].map((kind) => line.match(kind));
    if (!line.trim()) at += 1;
    else if (fence) at = code(lines, at, fence, made);
    else if (heading) {
      made.push(element(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(heading[2])));
      at += 1;
    } else if (RULE.test(line)) {
      made.push(element("hr"));
      at += 1;
    } else if (quote && depth < MAX_DEPTH) {
      const end = until(lines, at, (one) => !QUOTE.test(one));
      made.push(element("blockquote", {}, ...blocks(lines.slice(at, end).map((one) => one.match(QUOTE)[1]), depth + 1)));
      at = end;
    } else if (item && depth < MAX_DEPTH) at = list(lines, at, item, made, depth);
    else if (ROW.test(line) && DIVIDER.test(lines[at + 1] ?? "")) at = table(lines, at, made);
    else {
      const end = until(lines, at + 1, (one) => !one.trim() || [FENCE, HEADING, QUOTE, ITEM].some((kind) => kind.test(one)));
      made.push(element("p", {}, ...inline(lines.slice(at, end).join("\n"))));
      at = end;
    }
  }
  return made;
}

function code(lines, at, fence, made) {
  const end = until(lines, at + 1, (one) => one.trim().startsWith(fence[1]));
  made.push(element("pre", { title: fence[2] }, element("code", { textContent: lines.slice(at + 1, end).join("\n") })));
  return end + 1;
}

function list(lines, at, first, made, depth) {
  const indent = first[1].length;
  const isOrdered = /\d/.test(first[2]);
  const box = element(isOrdered ? "ol" : "ul", isOrdered ? { start: parseInt(first[2], 10) } : {});
  while (at < lines.length) {
    const item = lines[at].match(ITEM);
    if (!item || item[1].length !== indent || /\d/.test(item[2]) !== isOrdered) break;
    const inside = (one) => /^\s/.test(one) && one.search(/\S/) > indent;
    const end = until(lines, at + 1, (one) => one.trim() && !inside(one));
    const rest = lines.slice(at + 1, end).map((one) => one.slice(Math.min(indent + 2, Math.max(0, one.search(/\S/)))));
    box.append(element("li", {}, ...inline(item[3]), ...blocks(rest, depth + 1)));
    at = end;
  }
  made.push(box);
  return at;
}

function table(lines, at, made) {
  const end = until(lines, at + 2, (one) => !ROW.test(one));
  const row = (line, name) =>
    element("tr", {}, ...line.match(ROW)[1].split("|").map((cell) => element(name, {}, ...inline(cell.trim()))));
  made.push(element("table", {}, row(lines[at], "th"), ...lines.slice(at + 2, end).map((line) => row(line, "td"))));
  return end;
}

function until(lines, at, isEnd) {
  while (at < lines.length && !isEnd(lines[at])) at += 1;
  return at;
}

/** Returns the content of a paragraph as an array of strings and elements. */
function inline(text, depth = 0) {
  const found = depth < MAX_DEPTH ? text.match(INLINE) : null;
  if (!found) return [text];
  const [whole, , coded, bold, slanted, struck, name, address] = found;
  const within = (content) => inline(content, depth + 1);
  const made =
    coded !== undefined ? element("code", { textContent: coded })
    : bold !== undefined ? element("strong", {}, ...within(bold))
    : slanted !== undefined ? element("em", {}, ...within(slanted))
    : struck !== undefined ? element("s", {}, ...within(struck))
    : link(name, address);
  const after = text.slice(found.index + whole.length);
  return [text.slice(0, found.index), made, ...(after ? inline(after, depth) : [])];
}

/** Returns a link to an HTTP address. A link to any other address, such as a script, stays text. */
function link(name, address) {
  const url = URL.canParse(address) ? new URL(address) : null;
  if (!url || !/^https?$/.test(url.protocol.slice(0, -1))) return `[${name}](${address})`;
  return element("a", { href: url.href, target: "_blank", rel: "noopener noreferrer", textContent: name });
}
