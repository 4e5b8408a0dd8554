package payload

import "encoding/json"

// Text is the string, or the digits of the number, under a name of a decoded object; "" if there is something else or
// nothing.
func Text(object map[string]any, name string) string {
	switch v := object[name].(type) {
	case string:
		return v
	case json.Number:
		return string(v)
	}
	return ""
}

// Object is the object under a name of a decoded object; nil, from which reading gives nothing, if there is something
// else or nothing.
func Object(object map[string]any, name string) map[string]any {
	o, _ := object[name].(map[string]any)
	return o
}
