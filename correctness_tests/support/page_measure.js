// What a reader sees of the page: evaluated in it, gives sizes, contrasts and collisions.
() => {
  document.querySelectorAll("details").forEach((details) => { details.open = true; });

  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  // A CSS colour as [r, g, b, a], a of 1.
  const known = new Map();
  const rgba = (colour) => {
    if (!known.has(colour)) known.set(colour, parse(colour));
    return known.get(colour);
  };
  const parse = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3]));
  const luminance = (colour) => {
    const [r, g, b] = colour.map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  // What lies behind the text of an element: its ancestors' colours, and a tint in its own box.
  const grounds = new Map();
  const behind = (element) => {
    if (!grounds.has(element)) grounds.set(element, ground(element));
    return grounds.get(element);
  };
  const ground = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const style = getComputedStyle(at);
      const tint = style.backgroundImage.match(/rgba?\([^)]*\)/);
      if (tint) layers.push(rgba(tint[0]));
      const colour = rgba(style.backgroundColor);
      if (colour[3] > 0) layers.push(colour);
      if (colour[3] === 1) break;
    }
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255]);
  };

  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || element.closest("svg, title, style") || !element.checkVisibility()) continue;
    const colour = over(rgba(getComputedStyle(element).color), behind(element));
    texts.push({ text, contrast: contrast(colour, behind(element)) });
  }

  const plotted = [];
  const overlaps = [];
  const cut = [];
  for (const svg of document.querySelectorAll("figure > svg")) {
    const frame = svg.getBoundingClientRect();
    const boxes = [];
    const card = behind(svg.parentElement);
    const scale = svg.getScreenCTM().d;
    for (const element of svg.querySelectorAll("text")) {
      const style = getComputedStyle(element);
      const text = element.textContent;
      const box = element.getBoundingClientRect();
      const size = parseFloat(style.fontSize) * scale;
      const fill = rgba(style.fill);
      plotted.push({ text, size, fill: style.fill });
      texts.push({ text, contrast: contrast(over(fill, card), card) });
      if (box.left < frame.left - 1 || box.right > frame.right + 1
          || box.top < frame.top - 2 || box.bottom > frame.bottom + 2) cut.push(text);
      // Half a pixel of each side belongs to the rounding of boxes.
      for (const other of boxes) {
        if (box.left < other.box.right - 0.5 && other.box.left < box.right - 0.5
            && box.top < other.box.bottom - 0.5 && other.box.top < box.bottom - 0.5) {
          overlaps.push(`${other.text} and ${text}`);
        }
      }
      boxes.push({ text, box });
    }
  }

  // What is wider than its room: it must scroll, with a shadow that stays while the table moves.
  const hidden = [];
  const uncued = [];
  for (const element of document.body.querySelectorAll("*")) {
    if (element.scrollWidth <= element.clientWidth + 1 || element.clientWidth === 0) continue;
    if (element.closest("svg, caption.hidden")) continue;
    const style = getComputedStyle(element);
    const name = `${element.tagName} ${element.className}: ${element.textContent.trim().slice(0, 60)}`;
    if (style.overflowX === "hidden" || style.overflowX === "clip") hidden.push(name);
    if (!/auto|scroll/.test(style.overflowX)) continue;
    const fixed = style.backgroundAttachment.split(", ").filter((kind) => kind === "scroll").length;
    const local = style.backgroundAttachment.split(", ").filter((kind) => kind === "local").length;
    if (local < 2 || fixed < 2) uncued.push(name);
  }

  const root = getComputedStyle(document.documentElement);
  const card = rgba(root.getPropertyValue("--card"));
  const colours = {};
  for (const name of ["floor", "ceiling", "good", "bad", ...[0, 1, 2, 3, 4, 5, 6, 7].map((i) => `series-${i}`)]) {
    colours[name] = contrast(rgba(root.getPropertyValue(`--${name}`)), card);
  }
  return {
    width: document.documentElement.scrollWidth,
    room: window.innerWidth,
    background: getComputedStyle(document.body).backgroundColor,
    texts, plotted, overlaps, cut, colours, hidden, uncued,
  };
}
