// Describes elements, and changes a part of the document to match a description.
//
// Text only ever becomes a text node. No function here parses markup. Elements that stay keep their
// focus, their scroll position and what was typed into them.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "path", "rect", "line", "text", "title", "desc", "circle"]);

// h("p", { class: "note", onclick: act, key: 1 }, "text", h("b", {}, "more"))
export function h(tag, props, ...children) {
  return { tag, props: props ?? {}, children };
}

function isShown(child) {
  return child !== null && child !== undefined && child !== false && child !== "";
}

// Make the children of `parent` match the descriptions.
export function patch(parent, descriptions) {
  const wanted = descriptions.flat(Infinity).filter(isShown);
  const keyed = new Map();
  const keys = new Set(wanted.map((child) => child.props?.key));
  for (const node of [...parent.childNodes]) {
    if (node.bkvKey === undefined) continue;
    if (keys.has(node.bkvKey)) keyed.set(node.bkvKey, node);
    else node.remove();
  }
  let next = parent.firstChild;
  for (const child of wanted) {
    const key = child.props?.key;
    const known = key === undefined ? next : keyed.get(key);
    const node = matches(known, child) ? known : make(child, parent);
    if (node === next) next = next.nextSibling;
    else parent.insertBefore(node, next);
    update(node, child);
  }
  while (next) {
    const after = next.nextSibling;
    next.remove();
    next = after;
  }
}

function matches(node, child) {
  if (!node) return false;
  if (typeof child !== "object") return node.nodeType === Node.TEXT_NODE;
  return node.bkvTag === child.tag && node.bkvKey === child.props.key;
}

function make(child, parent) {
  if (typeof child !== "object") return document.createTextNode("");
  const isSvg = SVG_TAGS.has(child.tag) && (child.tag === "svg" || parent.namespaceURI === SVG);
  const node = isSvg ? document.createElementNS(SVG, child.tag) : document.createElement(child.tag);
  node.bkvTag = child.tag;
  node.bkvKey = child.props.key;
  node.bkvProps = {};
  return node;
}

function update(node, child) {
  if (typeof child !== "object") {
    const text = String(child);
    if (node.data !== text) node.data = text;
    return;
  }
  const before = node.bkvProps;
  for (const name of Object.keys(before)) {
    if (!(name in child.props)) setProp(node, name, null);
  }
  for (const [name, value] of Object.entries(child.props)) {
    if (before[name] !== value) setProp(node, name, value);
  }
  node.bkvProps = child.props;
  if (!child.props.keep) patch(node, child.children);
}

// `keep`: the children belong to somebody else. `made`: called once with the element.
// `start`: the value of a field when it is made. It does not overwrite what was typed later.
function setProp(node, name, value) {
  if (name === "key" || name === "keep") return;
  if (name === "made") {
    if (!node.bkvProps.made) queueMicrotask(() => value?.(node));
  } else if (name === "start") {
    if (node.bkvProps.start === undefined) queueMicrotask(() => (node.value = value));
  } else if (name.startsWith("on")) {
    node[name] = value;
  } else if (name.startsWith("--")) {
    node.style.setProperty(name, value); // the policy allows this, but no attribute "style"
  } else if (name === "checked" || name === "disabled" || name === "hidden") {
    node[name] = Boolean(value);
  } else if (value === null || value === undefined || value === false) {
    node.removeAttribute(name);
  } else {
    node.setAttribute(name, value === true ? "" : String(value));
  }
}
