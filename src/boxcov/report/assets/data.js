// The data of the study, decoded on first use.
const data = JSON.parse(document.getElementById("data").textContent);
const unpacked = new Map();

function array(number, Type) {
  if (number === undefined) return null;
  if (!unpacked.has(number)) {
    const text = atob(data.blobs[number]);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    unpacked.set(number, bytes.buffer);
  }
  return new Type(unpacked.get(number));
}

// The boxes of one method in one scene; value is the risk, or what the method has instead.
function boxesOf(method, scene) {
  const packed = method.shown[scene.frame];
  const value = array(packed.value, Float32Array);
  return {
    order: Array.from(value.keys()).sort((a, b) => value[b] - value[a] || a - b),
    value,
    total: packed.total,
    boxes: array(packed.boxes, Float32Array),
    errors: array(packed.errors, Float32Array),
    scores: array(packed.scores, Float32Array),
    labels: array(packed.labels, Int16Array),
    iou: array(packed.iou, Float32Array),
    l2: array(packed.l2, Float32Array),
    bad: array(packed.bad, Int8Array),
    std: array(packed.std, Float32Array),
    correlations: array(packed.correlations, Int16Array),
    predictive: array(packed.predictive, Float32Array),
    region: array(packed.region, Float32Array),
  };
}

function digits(value, count) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value < 0 ? "−∞" : "∞";
  const size = Math.abs(value);
  return size !== 0 && (size >= 1e5 || size < 1e-3) ? value.toExponential(count - 1) : String(Number(value.toPrecision(count)));
}

// The value of a box as text: a risk in percent, or a number with its unit.
function valueText(method, value) {
  if (method.value.name === "risk") return `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)} %`;
  return `${digits(value, 2)}${method.value.unit ? ` ${method.value.unit}` : ""}`;
}

const className = (label) => data.classes[label] ?? `class ${label}`;
