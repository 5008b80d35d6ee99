// The data of the study, decoded on first use, and the paper's four partitions.
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

// The rows of one method over all frames: u, frame number, and 1, 0 or -1 for accurate, inaccurate
// and not counted.
const methods = data.methods.map((packed) => {
  const u = array(packed.uncertainty, Float64Array);
  return {
    name: packed.name,
    note: packed.note,
    u,
    sorted: u.filter((value) => Number.isFinite(value)).sort(),
    mean: packed.threshold ?? Infinity,
    threshold: packed.threshold ?? Infinity,
    frame: array(packed.frame, Int32Array),
    accurate: { IoU: array(packed.accurate.IoU, Int8Array), l2: array(packed.accurate.l2, Int8Array) },
    shown: packed.shown,
  };
});

// The boxes of one method in one scene.
function boxesOf(method, scene) {
  const packed = method.shown[scene.frame];
  return {
    rows: Array.from(method.frame.keys()).filter((row) => method.frame[row] === scene.frame),
    boxes: array(packed.boxes, Float32Array),
    errors: array(packed.errors, Float32Array),
    scores: array(packed.scores, Float32Array),
    labels: array(packed.labels, Int16Array),
    iou: array(packed.iou, Float32Array),
    l2: array(packed.l2, Float32Array),
    std: array(packed.std, Float32Array),
    correlations: array(packed.correlations, Int16Array),
    predictive: array(packed.predictive, Float32Array),
  };
}

// AC, IC, AU or IU; null if the row does not count. Certain means u below the threshold.
function kindOf(method, row, threshold, error) {
  const accurate = method.accurate[error][row];
  if (accurate < 0) return null;
  return (accurate ? "A" : "I") + (method.u[row] < threshold ? "C" : "U");
}

function count(method, threshold, error, frame) {
  const counts = { AC: 0, IC: 0, AU: 0, IU: 0 };
  for (let row = 0; row < method.u.length; row++) {
    if (frame !== null && method.frame[row] !== frame) continue;
    const kind = kindOf(method, row, threshold, error);
    if (kind) counts[kind]++;
  }
  return counts;
}

// The slider selects a share of boxes: thresholds are quantiles of u, so every step moves some boxes.
function quantile(sorted, share) {
  if (!sorted.length) return 0;
  const place = share * (sorted.length - 1);
  const low = Math.floor(place);
  const high = Math.min(low + 1, sorted.length - 1);
  return sorted[low] + (place - low) * (sorted[high] - sorted[low]);
}

function shareBelow(sorted, threshold) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < threshold) low = middle + 1;
    else high = middle;
  }
  return sorted.length ? low / sorted.length : 0;
}

function digits(value, count) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  return size !== 0 && (size >= 1e5 || size < 1e-3) ? value.toExponential(count - 1) : String(Number(value.toPrecision(count)));
}
